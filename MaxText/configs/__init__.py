"""Configuration: MaxText's keys, K3's own, and the released `config.json`."""
