"""Images: where they come from, their decoding, and the preprocessing of models."""
