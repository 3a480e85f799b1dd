"""The compiled operators: checked arguments in, tensors out. One module per kernel family."""
