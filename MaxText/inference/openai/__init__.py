"""The OpenAI-compatible face: HTTP in, the core's requests out, and its tokens back as text.

gate → app (routes) → fields (what may be asked) → requests (prompts and limits) → the core → output (text, stop
strings, log-probabilities) → answers (what is sent).
"""
