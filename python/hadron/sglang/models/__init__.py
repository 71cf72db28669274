"""Model package of SGLang: `EntryClass` of each module lists its models."""
