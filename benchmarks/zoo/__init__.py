"""Models that other people wrote, trained privately as they are: time, memory and exactness. See docs/zoo.md."""
