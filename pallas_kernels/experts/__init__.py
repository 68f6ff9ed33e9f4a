"""The experts that tokens chose: both products of each, the activation between them, and the weighted sum."""
