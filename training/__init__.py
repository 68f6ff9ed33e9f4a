"""The embedded model's text and training: `python -m training.train`. Not part of the wheel."""
