"""Images and sound: reading, decoding, and the preprocessing of models."""
