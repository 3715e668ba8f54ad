"""Personal files: what a merge lost of one task's model, in about a hundredth of the base's size.

DTS (Decomposition, Thresholding, Scaling; arXiv 2512.01461): the residual θ_t − θ_merged of every tensor is
decomposed, its factors are quantised to two bits an entry, and the task's head is kept as it is. Everything
here is arithmetic on released weights: nothing looks at records, so a personal file costs no privacy beyond
what its two inputs cost.
"""
