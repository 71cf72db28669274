//! Linear layers fused with the ops before and after them, as [`LinearFusionPlan`] decides.

use kernels::{FusedLinear, LinearFusion, LinearPrologue, PrologueLinear};

use crate::launch_plan::LinearFusionPlan;
use crate::prefetch::PrefetchTarget;
use crate::{OpError, Ops, PackedLinear, Tensor};

/// Weight and epsilon of the root-mean-square norm whose result is the input of a linear layer.
#[derive(Debug, Clone, Copy)]
pub struct RmsNormParams<'a> {
    /// Weight of the norm, `[inputs]` with the number of inputs of the linear layer.
    pub weight: &'a Tensor,
    /// Epsilon, which is added to the mean square.
    pub eps: f32,
}

/// Input of a down projection: the product `silu(gate) · up`, or gate and up if the prologue of the down
/// projection computes the product.
#[derive(Debug)]
pub enum DownProjectionInput {
    /// Gate columns, then up columns: `[tokens, 2 · intermediate_size]`.
    GateUp(Tensor),
    /// The product `silu(gate) · up`: `[tokens, intermediate_size]`.
    Product(Tensor),
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
        if !self.linear_plan(x.rows(), w).is_fused() {
            return self.linear(&self.rms_norm(x, norm.weight, norm.eps)?, w);
        }
        let fusion =
            LinearFusion { norm: Some((norm.weight.mat()?, norm.eps)), ..LinearFusion::default() };
        self.launch_fused_linear(x, w, fusion, w.outputs())
    }

    /// Returns `silu(gate) · up` of the linear layer `norm(x) Wᵀ + bias`: `x [tokens, inputs]`, norm weight
    /// `[inputs]`, `W [2 · intermediate_size, inputs]`, result `[tokens, intermediate_size]`.
    pub fn norm_linear_silu_mul(
        &self,
        x: &Tensor,
        norm: RmsNormParams<'_>,
        w: &PackedLinear,
    ) -> Result<Tensor, OpError> {
        if !self.linear_plan(x.rows(), w).is_fused() {
            return self.linear_silu_mul(&self.rms_norm(x, norm.weight, norm.eps)?, w);
        }
        let norm = Some((norm.weight.mat()?, norm.eps));
        self.launch_fused_linear(
            x,
            w,
            LinearFusion { norm, silu_mul: true, ..LinearFusion::default() },
            w.outputs() / 2,
        )
    }

    /// Returns `silu(gate) · up` of the linear layer `x Wᵀ + bias`: `x [tokens, inputs]`, `W [2 ·
    /// intermediate_size, inputs]`, result `[tokens, intermediate_size]`.
    pub fn linear_silu_mul(&self, x: &Tensor, w: &PackedLinear) -> Result<Tensor, OpError> {
        let fused = self.linear_plan(x.rows(), w).is_fused_with_silu_mul();
        if w.bias.is_some() || !fused {
            return self.silu_mul(&self.linear(x, w)?);
        }
        self.launch_fused_linear(
            x,
            w,
            LinearFusion { silu_mul: true, ..LinearFusion::default() },
            w.outputs() / 2,
        )
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

    /// `y = (silu(gate) · up) Wᵀ + bias`: `x [tokens, 2 · inputs]` has the gate columns, then the up columns;
    /// `y` is `[tokens, outputs]`.
    pub fn silu_mul_linear(&self, x: &Tensor, w: &PackedLinear) -> Result<Tensor, OpError> {
        if !self.linear_plan(x.rows(), w).has_prologue() {
            return self.linear(&self.silu_mul(x)?, w);
        }
        self.launch_with_prologue(LinearPrologue::SiluMul(x.mat()?), w)
    }

    /// Returns `silu(gate) · up` of the linear layer `gate_up` over `norm(x)`, as input of the linear layer
    /// `down`: `x [tokens, inputs]`, weight of `gate_up` `[2 · intermediate_size, inputs]`.
    pub fn norm_linear_gated(
        &self,
        x: &Tensor,
        norm: RmsNormParams<'_>,
        gate_up: &PackedLinear,
        down: &PackedLinear,
    ) -> Result<DownProjectionInput, OpError> {
        if self.linear_plan(x.rows(), down).has_prologue() {
            return Ok(DownProjectionInput::GateUp(self.norm_linear(x, norm, gate_up)?));
        }
        Ok(DownProjectionInput::Product(self.norm_linear_silu_mul(x, norm, gate_up)?))
    }

    /// Adds `delta [tokens, inputs]` to `x`, then returns `silu(gate) · up` of the linear layer `gate_up`
    /// over `norm(x)`, as input of the linear layer `down`. See [`Ops::norm_linear_gated`].
    pub fn add_norm_linear_gated(
        &self,
        x: &mut Tensor,
        delta: &Tensor,
        norm: RmsNormParams<'_>,
        gate_up: &PackedLinear,
        down: &PackedLinear,
    ) -> Result<DownProjectionInput, OpError> {
        let rows = x.rows();
        if self.linear_plan(rows, down).has_prologue() {
            return Ok(DownProjectionInput::GateUp(self.add_norm_linear(x, delta, norm, gate_up)?));
        }
        if self.linear_plan(rows, gate_up).has_prologue() {
            return Ok(DownProjectionInput::Product(
                self.silu_mul(&self.add_norm_linear(x, delta, norm, gate_up)?)?,
            ));
        }
        let h = self.add_rms_norm(x, delta, norm.weight, norm.eps)?;
        Ok(DownProjectionInput::Product(self.linear_silu_mul(&h, gate_up)?))
    }

    /// Returns `silu(gate) · up` of the linear layer `gate_up` over `h [tokens, inputs]`, to which the norm
    /// has been applied already, as input of the linear layer `down`. See [`Ops::norm_linear_gated`].
    pub fn linear_gated(
        &self,
        h: &Tensor,
        gate_up: &PackedLinear,
        down: &PackedLinear,
    ) -> Result<DownProjectionInput, OpError> {
        if self.linear_plan(h.rows(), down).has_prologue() {
            return Ok(DownProjectionInput::GateUp(self.linear(h, gate_up)?));
        }
        Ok(DownProjectionInput::Product(self.linear_silu_mul(h, gate_up)?))
    }

    /// `y = (silu(gate) · up) Wᵀ + bias` for the gated activation `h`: `y [tokens, outputs]`.
    pub fn gated_linear(
        &self,
        h: &DownProjectionInput,
        w: &PackedLinear,
    ) -> Result<Tensor, OpError> {
        match h {
            DownProjectionInput::GateUp(gate_up) => self.silu_mul_linear(gate_up, w),
            DownProjectionInput::Product(h) => self.linear(h, w),
        }
    }

    /// `x += (silu(gate) · up) Wᵀ + bias` for the gated activation `h`. If fusing the addition with the norm
    /// that follows is faster, returns the addend instead and leaves `x` unchanged. See [`Ops::linear_add`].
    pub fn gated_linear_add(
        &self,
        x: &mut Tensor,
        h: &DownProjectionInput,
        w: &PackedLinear,
    ) -> Result<Option<Tensor>, OpError> {
        match h {
            DownProjectionInput::GateUp(gate_up) => self.silu_mul_linear(gate_up, w).map(Some),
            DownProjectionInput::Product(h) => self.linear_add(x, h, w),
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
        let next = self.launch_order.launch(w, fusion.silu_mul);
        let prefetch = next.as_ref().map(PrefetchTarget::hint);
        let fusion = LinearFusion { bias, prefetch, ..fusion };
        let (s, out) = (&self.stream, y.mat_mut()?);
        self.device
            .launch(s, FusedLinear { y: out, x: x.mat()?, weight: &w.weight, fusion: &fusion })?;
        Ok(y)
    }
}
