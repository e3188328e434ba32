"""Embedding models, heads, losses and metrics: plain torch modules and functions, nothing federated."""
