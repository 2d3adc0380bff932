"""The linear layers: qkv, attention output, gate and up, down; the output head is an operator of its own."""
