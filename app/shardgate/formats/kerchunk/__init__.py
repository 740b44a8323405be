"""Reference sets of kerchunk: keys that stand for parts of files in any format."""
