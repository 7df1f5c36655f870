"""Parts that all benchmarks share: clocks, records, reports, the style of pictures."""
