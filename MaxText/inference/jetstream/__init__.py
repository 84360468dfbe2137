"""JetStream: its engine contract over ours, and its gRPC protocol on the serving core."""
