//! `Ops`: memory, copies, and the maths of dense layers.
//!
//! All sums are computed in f32 in a fixed order. Results are rounded once to the model type: f32, bf16 or
//! f16.

use std::sync::Arc;

use device::{DType, DeviceError, DeviceStream, MemInfo};
use kernels::{
    AddRmsNorm, GateActivation, GatedActivation, GatedProduct, HostMat, KernelBackend, Linear,
    LogitSoftcap, PackedEmbedding, RmsNorm, RowGather, SigmoidGatedAdd, TensorAdd, TensorScalarMul,
    TokenEmbedding,
};

use crate::arena::{BufferArena, TensorStorage};
use crate::error::check_size;
use crate::prefetch::FusedLaunchTracker;
use crate::weights::EmbeddingStorage;
use crate::{EmbeddingTable, OpError, PackedLinear, Tensor};

/// The memory of results is padded to a multiple of this number of rows, the rows of a GEMM tile.
const TILE_ROWS: usize = 16;

/// Ops on one device, with activations of one type.
pub struct Ops {
    pub(crate) device: KernelBackend,
    pub(crate) stream: DeviceStream,
    pub(crate) arena: Arc<BufferArena>,
    /// Arena for results on the secondary stream. The main arena could reuse a buffer before the secondary
    /// stream has finished with it.
    pub(crate) secondary_arena: Arc<BufferArena>,
    /// Records the order in which fused linear layers are launched, by which a layer prefetches the weights
    /// of the next one.
    pub(crate) launch_order: FusedLaunchTracker,
    pub(crate) dtype: DType,
}

impl std::fmt::Debug for Ops {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ops")
            .field("device", &self.device.name())
            .field("dtype", &self.dtype)
            .finish_non_exhaustive()
    }
}

impl Ops {
    /// Creates ops on `device` with activations of type `dtype` (f32, bf16 or f16). Rejects a type for which
    /// the device has no kernels.
    pub fn new(device: KernelBackend, dtype: DType) -> Result<Self, OpError> {
        if !device.supports_dtype(dtype) {
            return Err(OpError::Activations { device: device.name(), dtype });
        }
        Ok(Self {
            device,
            stream: DeviceStream::default(),
            arena: Arc::default(),
            secondary_arena: Arc::default(),
            launch_order: FusedLaunchTracker::default(),
            dtype,
        })
    }

    /// Type of activations and of the residual stream.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Device on which the ops run, with its kernels.
    #[must_use]
    pub fn device(&self) -> &KernelBackend {
        &self.device
    }

    /// Stream on which all ops are launched; collectives are launched on it too.
    #[must_use]
    pub fn stream(&self) -> &DeviceStream {
        &self.stream
    }

    /// Returns the free and the total memory of the device.
    #[must_use]
    pub fn mem_info(&self) -> MemInfo {
        self.device.mem_info()
    }

    /// Interrupts the recorded launch order, so that the fused linear layer launched next is not recorded as
    /// the prefetch target of the fused linear layer launched last.
    pub fn interrupt_launch_order(&self) {
        self.launch_order.interrupt();
    }

    /// Allocates a tensor from the arena, with undefined contents. Its memory is padded to whole GEMM tiles
    /// of rows, because GEMM kernels may write after the last row.
    pub fn scratch(&self, dtype: DType, shape: &[usize]) -> Result<Tensor, OpError> {
        let rows = shape.first().map_or(1, |rows| rows.next_multiple_of(TILE_ROWS));
        let bytes = rows * shape.iter().skip(1).product::<usize>() * dtype.bytes();
        let buffer = self.arena.take(&self.device, bytes)?;
        Ok(Tensor::new(TensorStorage::new(buffer, Some(self.arena.clone())), dtype, shape))
    }

    /// Allocates a zeroed tensor outside the arena, for weights and tables.
    pub fn zeros(&self, dtype: DType, shape: &[usize]) -> Result<Tensor, OpError> {
        let buffer = self.device.alloc(shape.iter().product::<usize>() * dtype.bytes())?;
        Ok(Tensor::new(TensorStorage::new(buffer, None), dtype, shape))
    }

    /// Uploads the matrices `parts`, stacked by rows, as one tensor of type `dtype`; for norm weights, untied
    /// embedding tables and biases. The matrices have rows of equal length and any float type.
    pub fn upload(&self, parts: &[HostMat<'_>], dtype: DType) -> Result<Tensor, OpError> {
        let cols = parts.first().map_or(0, HostMat::cols);
        let rows = parts.iter().map(HostMat::rows).sum();
        let mut tensor = self.zeros(dtype, &[rows, cols])?;
        let mut row = vec![0.0f32; cols];
        let mut bytes = Vec::with_capacity(cols * 4);
        let mut offset = 0;
        for part in parts {
            check_size("upload", "columns of a part", part.cols(), cols)?;
            for r in 0..part.rows() {
                bytes.clear();
                if part.dtype() == dtype {
                    bytes.extend_from_slice(part.row_bytes(r));
                } else {
                    part.read_row(r, &mut row);
                    encode(&row, dtype, &mut bytes)?;
                }
                self.device.upload(tensor.buffer_mut()?, offset, &bytes)?;
                offset += bytes.len();
            }
        }
        Ok(tensor)
    }

    /// Copies host integers (token ids, row indices) to an arena tensor `[ids.len()]`.
    pub fn ids(&self, ids: &[i32]) -> Result<Tensor, OpError> {
        let mut tensor = self.scratch(DType::I32, &[ids.len()])?;
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.device.upload(tensor.buffer_mut()?, 0, &bytes)?;
        Ok(tensor)
    }

    /// Copies host integers to a tensor `[1, ids.len()]` outside the arena, for tables that are kept with the
    /// weights.
    pub fn id_table(&self, ids: &[i32]) -> Result<Tensor, OpError> {
        let mut tensor = self.zeros(DType::I32, &[1, ids.len()])?;
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.device.upload(tensor.buffer_mut()?, 0, &bytes)?;
        Ok(tensor)
    }

    /// Copies host floats to an arena tensor of the given type and shape.
    pub fn floats(&self, x: &[f32], dtype: DType, shape: &[usize]) -> Result<Tensor, OpError> {
        check_size("floats", "elements", x.len(), shape.iter().product())?;
        let mut tensor = self.scratch(dtype, shape)?;
        let mut bytes = Vec::with_capacity(x.len() * 4);
        encode(x, dtype, &mut bytes)?;
        self.device.upload(tensor.buffer_mut()?, 0, &bytes)?;
        Ok(tensor)
    }

    /// Copies a float tensor to the host as f32.
    pub fn read_f32(&self, x: &Tensor) -> Result<Vec<f32>, OpError> {
        let mut bytes = vec![0; x.len() * x.dtype().bytes()];
        self.device.download(&self.stream, x.buffer(), 0, &mut bytes)?;
        let host = HostMat::new(&bytes, x.dtype(), 1, x.len())?;
        let mut out = vec![0.0; x.len()];
        host.read_row(0, &mut out);
        Ok(out)
    }

    /// Packs the weight matrices `parts`, stacked along the outputs (for example q, k and v), as one linear
    /// layer with weights in the model type.
    pub fn pack_linear(
        &self,
        parts: &[HostMat<'_>],
        bias: Option<&[f32]>,
    ) -> Result<PackedLinear, OpError> {
        let weight = Arc::new(self.device.pack(parts, self.dtype)?);
        let bias = match bias {
            Some(bias) => {
                check_size("pack_linear", "bias", bias.len(), weight.n())?;
                let mut tensor = self.zeros(DType::F32, &[bias.len()])?;
                let bytes: Vec<u8> = bias.iter().flat_map(|b| b.to_le_bytes()).collect();
                self.device.upload(tensor.buffer_mut()?, 0, &bytes)?;
                Some(Arc::new(tensor))
            }
            None => None,
        };
        Ok(PackedLinear::new(weight, bias))
    }

    /// Embedding lookup `y[t] = table[ids[t]]`; zeros for ids outside this rank's shard. `ids` is i32
    /// `[tokens]`, `y` is `[tokens, hidden_size]`.
    pub fn embed(&self, table: &EmbeddingTable, ids: &Tensor) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        let mut y = self.scratch(self.dtype, &[ids.len(), table.hidden()])?;
        let (s, out, first) = (&self.stream, y.mat_mut()?, table.first);
        match &table.table {
            EmbeddingStorage::Rows(rows) => {
                self.device.launch(
                    s,
                    TokenEmbedding { y: out, ids: ids.mat()?, table: rows.mat()?, first },
                )?;
            }
            EmbeddingStorage::Packed(w) => {
                self.device
                    .launch(s, PackedEmbedding { y: out, ids: ids.mat()?, table: w, first })?;
            }
        }
        Ok(y)
    }

    /// Root-mean-square norm: `y = w · cast(x / sqrt(mean(x²) + eps))`; `x` and `y` are `[tokens,
    /// hidden_size]`, `w` is `[hidden_size]`. `cast` rounds to the activation type; if `w` is f32, only `y` is
    /// rounded. Source: Zhang and Sennrich, 2019.
    pub fn rms_norm(&self, x: &Tensor, w: &Tensor, eps: f32) -> Result<Tensor, OpError> {
        let y = self.scratch(x.dtype(), x.shape())?;
        self.rms_norm_to(y, x, w, eps)
    }

    /// [`Ops::rms_norm`] to the memory of `y`, which is returned.
    pub fn rms_norm_to(
        &self,
        mut y: Tensor,
        x: &Tensor,
        w: &Tensor,
        eps: f32,
    ) -> Result<Tensor, OpError> {
        self.device.launch(
            &self.stream,
            RmsNorm { y: y.mat_mut()?, x: x.mat()?, weight: w.mat()?, eps },
        )?;
        Ok(y)
    }

    /// Adds `delta` to the residual stream `x` in place, rounded once, and returns `rms_norm(x)`.
    pub fn add_rms_norm(
        &self,
        x: &mut Tensor,
        delta: &Tensor,
        w: &Tensor,
        eps: f32,
    ) -> Result<Tensor, OpError> {
        let y = self.scratch(x.dtype(), x.shape())?;
        self.add_rms_norm_to(y, x, delta, w, eps)
    }

    /// [`Ops::add_rms_norm`] to the memory of `y`, which is returned.
    pub fn add_rms_norm_to(
        &self,
        mut y: Tensor,
        x: &mut Tensor,
        delta: &Tensor,
        w: &Tensor,
        eps: f32,
    ) -> Result<Tensor, OpError> {
        let (s, delta, w) = (&self.stream, delta.mat()?, w.mat()?);
        self.device
            .launch(s, AddRmsNorm { y: y.mat_mut()?, x: x.mat_mut()?, delta, weight: w, eps })?;
        Ok(y)
    }

    /// Linear layer `y = x Wᵀ + bias` in the type of `x`: `x [tokens, inputs]`, `y [tokens, outputs]`.
    pub fn linear(&self, x: &Tensor, w: &PackedLinear) -> Result<Tensor, OpError> {
        self.linear_to(self.scratch(x.dtype(), &[x.rows(), w.outputs()])?, x, w)
    }

    /// Linear layer `y = x Wᵀ + bias` that returns the f32 sums, not rounded to the model type; for logits of
    /// LM heads and routers.
    pub fn linear_f32(&self, x: &Tensor, w: &PackedLinear) -> Result<Tensor, OpError> {
        self.linear_to(self.scratch(DType::F32, &[x.rows(), w.outputs()])?, x, w)
    }

    /// Linear layer `y = x Wᵀ + bias` to the memory of `y`, which is returned, in the type of `y`.
    pub fn linear_to(
        &self,
        mut y: Tensor,
        x: &Tensor,
        w: &PackedLinear,
    ) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        check_size("linear", "inputs", x.cols(), w.inputs())?;
        check_size("linear", "outputs", y.cols(), w.outputs())?;
        let bias = w.bias.as_ref().map(|b| b.mat()).transpose()?;
        self.device.launch(
            &self.stream,
            Linear { y: y.mat_mut()?, x: x.mat()?, weight: &w.weight, bias },
        )?;
        Ok(y)
    }

    /// Returns the activation of gate and up `[tokens, cols]`: `x [tokens, 2 · cols]` has the gate columns, then
    /// the up columns.
    pub fn gated_activation(
        &self,
        x: &Tensor,
        activation: GateActivation,
    ) -> Result<Tensor, OpError> {
        let mut y = self.scratch(x.dtype(), &[x.rows(), x.cols() / 2])?;
        let op = GatedActivation { y: y.mat_mut()?, x: x.mat()?, activation };
        self.device.launch(&self.stream, op)?;
        Ok(y)
    }

    /// Returns the activation of `gate [tokens, cols]` and of the columns of `up` from `first` on; the result has the
    /// shape of `gate`.
    pub fn gated_product(
        &self,
        gate: &Tensor,
        up: &Tensor,
        first: usize,
        activation: GateActivation,
    ) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        let mut y = self.scratch(gate.dtype(), gate.shape())?;
        let up = up.mat()?.columns(first, gate.cols());
        let op = GatedProduct { y: y.mat_mut()?, gate: gate.mat()?, up, activation };
        self.device.launch(&self.stream, op)?;
        Ok(y)
    }

    /// Adds two tensors of the same shape: `y = a + b`.
    pub fn add(&self, a: &Tensor, b: &Tensor) -> Result<Tensor, OpError> {
        let mut y = self.scratch(a.dtype(), a.shape())?;
        self.device
            .launch(&self.stream, TensorAdd { y: y.mat_mut()?, a: a.mat()?, b: b.mat()? })?;
        Ok(y)
    }

    /// Applies logit soft-capping `x = cap · tanh(x / cap)`, in place: `x [rows, cols]`, `cap` not 0.
    pub fn softcap(&self, x: &mut Tensor, cap: f32) -> Result<(), OpError> {
        Ok(self.device.launch(&self.stream, LogitSoftcap { x: x.mat_mut()?, cap })?)
    }

    /// Multiplies `x [rows, cols]` by `factor`, in place. Launches nothing if the factor is 1.
    pub fn scale(&self, x: &mut Tensor, factor: f32) -> Result<(), OpError> {
        if factor.to_bits() == 1f32.to_bits() {
            return Ok(());
        }
        Ok(self.device.launch(&self.stream, TensorScalarMul { x: x.mat_mut()?, factor })?)
    }

    /// Adds gated rows, `y[i] += sigmoid(gate[i]) · x[i]`: `y` and `x [tokens, hidden_size]`, `gate` f32
    /// `[tokens, 1]`.
    pub fn add_gated(&self, y: &mut Tensor, x: &Tensor, gate: &Tensor) -> Result<(), OpError> {
        let op = SigmoidGatedAdd { y: y.mat_mut()?, x: x.mat()?, gate: gate.mat()? };
        Ok(self.device.launch(&self.stream, op)?)
    }

    /// Gathers rows, `y[i] = x[rows[i]]`: `x [tokens, hidden_size]`, `rows` i32 `[n]`, `y [n, hidden_size]`.
    pub fn gather_rows(&self, x: &Tensor, rows: &Tensor) -> Result<Tensor, OpError> {
        let mut y = self.scratch(x.dtype(), &[rows.len(), x.cols()])?;
        self.device
            .launch(&self.stream, RowGather { y: y.mat_mut()?, x: x.mat()?, rows: rows.mat()? })?;
        Ok(y)
    }
}

/// Appends `x` to `bytes` in type `dtype`, little-endian and rounded to nearest even.
fn encode(x: &[f32], dtype: DType, bytes: &mut Vec<u8>) -> Result<(), OpError> {
    match dtype {
        DType::F32 => bytes.extend(x.iter().flat_map(|v| v.to_le_bytes())),
        DType::BF16 => {
            bytes.extend(x.iter().flat_map(|v| device::bf16::from_f32(*v).to_le_bytes()));
        }
        DType::F16 => {
            bytes.extend(x.iter().flat_map(|v| device::f16::from_f32(*v).to_le_bytes()));
        }
        dtype => {
            return Err(DeviceError::Unsupported { kernel: "upload", what: "float", dtype }.into());
        }
    }
    Ok(())
}
