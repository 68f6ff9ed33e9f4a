"""LoRA adapters: their weights, their tokenizers and chat templates, and the rows of steps that use them."""
