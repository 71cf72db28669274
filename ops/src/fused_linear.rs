//! Linear layers fused with the ops before and after them, as [`LinearFusionPlan`] decides.

use kernels::{FusedLinear, GateActivation, LinearFusion, LinearPrologue, PrologueLinear};

use crate::launch_plan::LinearFusionPlan;
use crate::prefetch::PrefetchTarget;
use crate::{OpError, Ops, PackedLinear, Tensor};

/// Weight and epsilon of the root-mean-square norm whose result is the input of a linear layer.
#[derive(Debug, Clone, Copy)]
pub struct RmsNormParams<'a> {
    /// Weight of the norm, `[inputs]` with the number of inputs of the linear layer, in the activation type or
    /// in f32 (see [`Ops::rms_norm`]).
    pub weight: &'a Tensor,
    /// Epsilon, which is added to the mean square.
    pub eps: f32,
}

/// Projections and activation function of a gated MLP.
#[derive(Debug, Clone, Copy)]
pub struct GatedMlpWeights<'a> {
    /// Gate and up projection `[2 · intermediate_size, inputs]`, gate rows first.
    pub gate_up: &'a PackedLinear,
    /// Down projection `[outputs, intermediate_size]`.
    pub down: &'a PackedLinear,
    /// Function that computes the input of the down projection from gate and up.
    pub activation: GateActivation,
}

/// Input of a down projection: the activation of gate and up, or gate and up if the prologue of the down
/// projection computes the activation.
#[derive(Debug)]
pub enum DownProjectionInput {
    /// Gate and up, to which the prologue applies the activation function.
    GateUp {
        /// Gate columns, then up columns: `[tokens, 2 · intermediate_size]`.
        gate_up: Tensor,
        /// Function of gate and up.
        activation: GateActivation,
    },
    /// The activation: `[tokens, intermediate_size]`.
    Activation(Tensor),
}

impl Ops {
    fn linear_plan<'a>(&'a self, rows: usize, w: &'a PackedLinear) -> LinearFusionPlan<'a> {
        LinearFusionPlan { backend: &self.device, rows, dtype: self.dtype(), weight: &w.weight }
    }

    /// `y = norm(x) Wᵀ + bias`: `x [tokens, inputs]`, norm weight `[inputs]`, `y [tokens, outputs]`. See
    /// [`Ops::rms_norm`].
    pub fn norm_linear(
        &self,
        x: &Tensor,
        norm: RmsNormParams<'_>,
        w: &PackedLinear,
    ) -> Result<Tensor, OpError> {
        if !self.linear_plan(x.rows(), w).is_fused_with_norm(norm.weight.dtype()) {
            return self.linear(&self.rms_norm(x, norm.weight, norm.eps)?, w);
        }
        let fusion =
            LinearFusion { norm: Some((norm.weight.mat()?, norm.eps)), ..LinearFusion::default() };
        self.launch_fused_linear(x, w, fusion, w.outputs())
    }

    /// Returns the activation of gate and up, which are the halves of the columns of `norm(x) Wᵀ + bias`: `x
    /// [tokens, inputs]`, norm weight `[inputs]`, `W [2 · intermediate_size, inputs]`, result `[tokens,
    /// intermediate_size]`.
    pub fn norm_linear_activation(
        &self,
        x: &Tensor,
        norm: RmsNormParams<'_>,
        w: &PackedLinear,
        activation: GateActivation,
    ) -> Result<Tensor, OpError> {
        if !self.linear_plan(x.rows(), w).is_fused_with_norm(norm.weight.dtype()) {
            let h = self.rms_norm(x, norm.weight, norm.eps)?;
            return self.linear_activation(&h, w, activation);
        }
        let norm = Some((norm.weight.mat()?, norm.eps));
        let fusion = LinearFusion { norm, gate: Some(activation), ..LinearFusion::default() };
        self.launch_fused_linear(x, w, fusion, w.outputs() / 2)
    }

    /// Returns the activation of gate and up, which are the halves of the columns of `x Wᵀ + bias`: `x [tokens,
    /// inputs]`, `W [2 · intermediate_size, inputs]`, result `[tokens, intermediate_size]`.
    pub fn linear_activation(
        &self,
        x: &Tensor,
        w: &PackedLinear,
        activation: GateActivation,
    ) -> Result<Tensor, OpError> {
        let fused = self.linear_plan(x.rows(), w).is_fused_with_gate();
        if w.bias.is_some() || !fused {
            return self.gated_activation(&self.linear(x, w)?, activation);
        }
        let fusion = LinearFusion { gate: Some(activation), ..LinearFusion::default() };
        self.launch_fused_linear(x, w, fusion, w.outputs() / 2)
    }

    /// `x += h Wᵀ + bias` for the residual stream `x [tokens, outputs]` and `h [tokens, inputs]`. If fusing
    /// the addition with the norm that follows is faster ([`Ops::add_rms_norm`], [`Ops::add_norm_linear`]),
    /// returns `Some(h Wᵀ + bias)` instead and leaves `x` unchanged.
    pub fn linear_add(
        &self,
        x: &mut Tensor,
        h: &Tensor,
        w: &PackedLinear,
    ) -> Result<Option<Tensor>, OpError> {
        if !self.linear_plan(h.rows(), w).is_fused() {
            return self.linear(h, w).map(Some);
        }
        let bias = w.bias.as_ref().map(|b| b.mat()).transpose()?;
        let next = self.launch_order.launch(w, false);
        let prefetch = next.as_ref().map(PrefetchTarget::hint);
        let fusion = LinearFusion { bias, add: true, prefetch, ..LinearFusion::default() };
        let op = FusedLinear { y: x.mat_mut()?, x: h.mat()?, weight: &w.weight, fusion: &fusion };
        self.device.launch(&self.stream, op)?;
        Ok(None)
    }

    /// `x += delta`, then `y = norm(x) Wᵀ + bias`: `x` and `delta` are `[tokens, inputs]`, the norm weight
    /// `[inputs]`, `y [tokens, outputs]`. See [`Ops::add_rms_norm`].
    pub fn add_norm_linear(
        &self,
        x: &mut Tensor,
        delta: &Tensor,
        norm: RmsNormParams<'_>,
        w: &PackedLinear,
    ) -> Result<Tensor, OpError> {
        if !self.linear_plan(x.rows(), w).has_prologue() {
            return self.linear(&self.add_rms_norm(x, delta, norm.weight, norm.eps)?, w);
        }
        let (delta, eps, norm) = (delta.mat()?, norm.eps, norm.weight.mat()?);
        self.launch_with_prologue(LinearPrologue::AddNorm { x: x.mat_mut()?, delta, norm, eps }, w)
    }

    /// `y = h Wᵀ + bias`, where `h` is the activation of gate and up: `x [tokens, 2 · inputs]` has the gate
    /// columns, then the up columns; `y` is `[tokens, outputs]`.
    pub fn activation_linear(
        &self,
        x: &Tensor,
        w: &PackedLinear,
        activation: GateActivation,
    ) -> Result<Tensor, OpError> {
        if !self.linear_plan(x.rows(), w).has_prologue() {
            return self.linear(&self.gated_activation(x, activation)?, w);
        }
        self.launch_with_prologue(LinearPrologue::Gated { x: x.mat()?, activation }, w)
    }

    /// Returns the input of the down projection of the gated MLP `mlp` over `norm(x)`: `x [tokens, inputs]`.
    pub fn norm_linear_gated(
        &self,
        x: &Tensor,
        norm: RmsNormParams<'_>,
        mlp: GatedMlpWeights<'_>,
    ) -> Result<DownProjectionInput, OpError> {
        let GatedMlpWeights { gate_up, down, activation } = mlp;
        if self.linear_plan(x.rows(), down).has_prologue() {
            let gate_up = self.norm_linear(x, norm, gate_up)?;
            return Ok(DownProjectionInput::GateUp { gate_up, activation });
        }
        let h = self.norm_linear_activation(x, norm, gate_up, activation)?;
        Ok(DownProjectionInput::Activation(h))
    }

    /// Adds `delta [tokens, inputs]` to `x`, then returns the input of the down projection of the gated MLP
    /// `mlp` over `norm(x)`. See [`Ops::norm_linear_gated`].
    pub fn add_norm_linear_gated(
        &self,
        x: &mut Tensor,
        delta: &Tensor,
        norm: RmsNormParams<'_>,
        mlp: GatedMlpWeights<'_>,
    ) -> Result<DownProjectionInput, OpError> {
        let (rows, GatedMlpWeights { gate_up, down, activation }) = (x.rows(), mlp);
        if self.linear_plan(rows, down).has_prologue() {
            let gate_up = self.add_norm_linear(x, delta, norm, gate_up)?;
            return Ok(DownProjectionInput::GateUp { gate_up, activation });
        }
        let h = if self.linear_plan(rows, gate_up).has_prologue() {
            self.gated_activation(&self.add_norm_linear(x, delta, norm, gate_up)?, activation)?
        } else {
            let h = self.add_rms_norm(x, delta, norm.weight, norm.eps)?;
            self.linear_activation(&h, gate_up, activation)?
        };
        Ok(DownProjectionInput::Activation(h))
    }

    /// Returns the input of the down projection of the gated MLP `mlp` over `h [tokens, inputs]`, to which the
    /// norm has been applied already. See [`Ops::norm_linear_gated`].
    pub fn linear_gated(
        &self,
        h: &Tensor,
        mlp: GatedMlpWeights<'_>,
    ) -> Result<DownProjectionInput, OpError> {
        let GatedMlpWeights { gate_up, down, activation } = mlp;
        if self.linear_plan(h.rows(), down).has_prologue() {
            let gate_up = self.linear(h, gate_up)?;
            return Ok(DownProjectionInput::GateUp { gate_up, activation });
        }
        let h = self.linear_activation(h, gate_up, activation)?;
        Ok(DownProjectionInput::Activation(h))
    }

    /// `y = h Wᵀ + bias` for the input `h` of the down projection `W`: `y [tokens, outputs]`.
    pub fn gated_linear(
        &self,
        h: &DownProjectionInput,
        w: &PackedLinear,
    ) -> Result<Tensor, OpError> {
        match h {
            DownProjectionInput::GateUp { gate_up, activation } => {
                self.activation_linear(gate_up, w, *activation)
            }
            DownProjectionInput::Activation(h) => self.linear(h, w),
        }
    }

    /// `x += h Wᵀ + bias` for the input `h` of the down projection `W`. If fusing the addition with the norm that
    /// follows is faster, returns the addend instead and leaves `x` unchanged. See [`Ops::linear_add`].
    pub fn gated_linear_add(
        &self,
        x: &mut Tensor,
        h: &DownProjectionInput,
        w: &PackedLinear,
    ) -> Result<Option<Tensor>, OpError> {
        match h {
            DownProjectionInput::GateUp { gate_up, activation } => {
                self.activation_linear(gate_up, w, *activation).map(Some)
            }
            DownProjectionInput::Activation(h) => self.linear_add(x, h, w),
        }
    }

    fn launch_with_prologue(
        &self,
        prologue: LinearPrologue<'_>,
        w: &PackedLinear,
    ) -> Result<Tensor, OpError> {
        self.launch_order.interrupt();
        let mut y = self.scratch(self.dtype(), &[prologue.rows(), w.outputs()])?;
        let bias = w.bias.as_ref().map(|b| b.mat()).transpose()?;
        self.device.launch(
            &self.stream,
            PrologueLinear { y: y.mat_mut()?, prologue, weight: &w.weight, bias },
        )?;
        Ok(y)
    }

    fn launch_fused_linear(
        &self,
        x: &Tensor,
        w: &PackedLinear,
        fusion: LinearFusion<'_>,
        outputs: usize,
    ) -> Result<Tensor, OpError> {
        let mut y = self.scratch(x.dtype(), &[x.rows(), outputs])?;
        let bias = w.bias.as_ref().map(|b| b.mat()).transpose()?;
        let next = self.launch_order.launch(w, fusion.gate.is_some());
        let prefetch = next.as_ref().map(PrefetchTarget::hint);
        let fusion = LinearFusion { bias, prefetch, ..fusion };
        let (s, out) = (&self.stream, y.mat_mut()?);
        self.device
            .launch(s, FusedLinear { y: out, x: x.mat()?, weight: &w.weight, fusion: &fusion })?;
        Ok(y)
    }
}
