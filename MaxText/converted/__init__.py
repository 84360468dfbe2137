"""Converted checkpoints: what lies where on disk, how a finished one is known, and how devices read it.

`conversion/` writes them; see docs/conversion.md.
"""
