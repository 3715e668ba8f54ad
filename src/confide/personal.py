"""Personal files from Python, as `confide personal` makes them."""

from confide.merging.personal.apply import Applied as Applied
from confide.merging.personal.apply import apply as apply
from confide.merging.personal.apply import fuse as fuse
from confide.merging.personal.apply import unpack as unpack
from confide.merging.personal.pack import Packed as Packed
from confide.merging.personal.pack import pack as pack
from confide.merging.personal.similarity import head_similarities as head_similarities
