"""Mixture of block attention: each query attends to its own key block and to the best-scoring others."""
