"""The planner: this project's own programs compiled for a slice that isn't there, and what the compiler says of them."""
