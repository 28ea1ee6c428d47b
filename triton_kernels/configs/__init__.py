"""Block sizes, warps and stages as pure functions of architecture, head sizes and dtype."""
