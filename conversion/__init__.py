"""Offline conversion of released checkpoints: MXFP4 experts and plain matrices into block-FP8, with what it changed."""
