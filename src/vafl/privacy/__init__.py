"""What keeps embeddings from telling too much. Here so far: clipping and Gaussian noise."""
