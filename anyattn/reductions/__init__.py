"""Reductions of the softmax's probabilities and of the scores: which a call asks for, and their computation from the log-sum-exp."""
