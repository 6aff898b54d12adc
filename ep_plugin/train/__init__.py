"""The trainer behind ``ep_plugin.launch``: text in, a Hugging Face MoE trained, curves and checkpoints out."""
