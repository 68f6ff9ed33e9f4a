"""LoRA adapters: what is read of them, whose texts they change, and the rows of steps that they take part in."""
