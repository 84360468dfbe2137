"""K3's layers: each module declares its weights and gives pure functions over them."""
