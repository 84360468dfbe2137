"""Kimi K3 for people who live in MaxText: an overlay of configuration, layers and engine on the `maxtext` package."""
