"""Stands in for the flash-attn package where it is not installed; see flash_attn_interface."""
