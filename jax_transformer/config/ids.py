"""Token ids and labels with a meaning of their own."""

# Token ids, as in the lecture document's `greedy_decode` and `Transformer`.
PAD_ID = 0
UNK_ID = 1
BOS_ID = 2
EOS_ID = 3

# The label of a position that carries no loss (PyTorch's default `ignore_index`).
IGNORED_LABEL = -100
