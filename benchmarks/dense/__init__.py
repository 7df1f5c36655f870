"""Dense attention beside cuDNN, FlashAttention 2 and FlexAttention."""
