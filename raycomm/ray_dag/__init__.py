"""Everything that depends on Ray's Compiled Graph classes, and nothing else; it leaves when they leave."""
