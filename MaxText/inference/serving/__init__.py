"""Serving: one core that shares an engine among requests, and what its faces (JetStream, OpenAI) have in common."""
