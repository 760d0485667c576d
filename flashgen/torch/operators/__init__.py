"""The dispatcher operators ``torch.ops.flashgen.*``."""
