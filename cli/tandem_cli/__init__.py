"""The tandem command: thin, it composes the other packages."""
