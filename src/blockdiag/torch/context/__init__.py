"""One sequence over several processes: context parallelism by torch.distributed."""
