//! Tensors and shape-checked maths on one device.
