"""Sharing: memory handed from process to process, kept alive by a broker, and laid side by side by ranks."""
