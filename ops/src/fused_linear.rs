//! Linear layers with their neighbours: one launch where the device has one, else the kernels one by one.
//! Either way the results are the same.
//!
//! Legend: T tokens, H hidden, N outputs, K inputs, I intermediate size.

use kernels::{LinearFusion, LinearPrologue};

use crate::{OpError, Ops, PackedLinear, Tensor};

impl Ops {
    /// Whether a layer of these inputs is one launch together with its neighbours.
    #[must_use]
    pub fn fuses_linear(&self, rows: usize, w: &PackedLinear) -> bool {
        self.device.fuses_linear(rows, self.dtype(), &w.weight)
    }

    /// `y = norm(x) Wᵀ + bias`: `x [T, K]`, `norm [K]`, `y [T, N]`. See [`Ops::rms_norm`].
    pub fn norm_linear(
        &self,
        x: &Tensor,
        (norm, eps): (&Tensor, f32),
        w: &PackedLinear,
    ) -> Result<Tensor, OpError> {
        if !self.fuses_linear(x.rows(), w) {
            return self.linear(&self.rms_norm(x, norm, eps)?, w);
        }
        let around = LinearFusion { norm: Some((norm.mat()?, eps)), ..LinearFusion::default() };
        self.launch_fused_linear(x, w, around, w.outputs())
    }

    /// `y = silu(gate) · up` of `norm(x) Wᵀ + bias`: `x [T, K]`, `norm [K]`, `W [2 I, K]`, `y [T, I]`.
    pub fn norm_linear_silu_mul(
        &self,
        x: &Tensor,
        (norm, eps): (&Tensor, f32),
        w: &PackedLinear,
    ) -> Result<Tensor, OpError> {
        if !self.fuses_linear(x.rows(), w) {
            return self.linear_silu_mul(&self.rms_norm(x, norm, eps)?, w);
        }
        let norm = Some((norm.mat()?, eps));
        self.launch_fused_linear(
            x,
            w,
            LinearFusion { norm, silu_mul: true, ..LinearFusion::default() },
            w.outputs() / 2,
        )
    }

    /// `y = silu(gate) · up` of `x Wᵀ + bias`: `x [T, K]`, `W [2 I, K]`, `y [T, I]`.
    pub fn linear_silu_mul(&self, x: &Tensor, w: &PackedLinear) -> Result<Tensor, OpError> {
        let fused = self.device.fuses_linear_silu_mul(x.rows(), self.dtype(), &w.weight);
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

    /// `x += h Wᵀ + bias`: `h [T, K]`, `x [T, N]`, the residual stream, rounded once more by the sum.
    pub fn linear_add(&self, x: &mut Tensor, h: &Tensor, w: &PackedLinear) -> Result<(), OpError> {
        if !self.fuses_linear(h.rows(), w) {
            *x = self.add(x, &self.linear(h, w)?)?;
            return Ok(());
        }
        let bias = w.bias.as_ref().map(|b| b.mat()).transpose()?;
        let around =
            LinearFusion { bias, add: true, prefetch: w.prefetch(), ..LinearFusion::default() };
        let (s, y) = (&self.stream, x.mat_mut()?);
        Ok(self.device.fused_linear(s, y, h.mat()?, &w.weight, &around)?)
    }

    /// Whether a layer of these inputs takes along what makes them: [`Ops::silu_mul_linear`].
    #[must_use]
    pub fn fuses_prologue(&self, rows: usize, w: &PackedLinear) -> bool {
        self.device.fuses_prologue(rows, self.dtype(), &w.weight)
    }

    /// `y = norm(x += delta) Wᵀ + bias`: `x`, `delta [T, K]`, `norm [K]`, `y [T, N]`. See [`Ops::add_rms_norm`].
    pub fn add_norm_linear(
        &self,
        x: &mut Tensor,
        delta: &Tensor,
        (norm, eps): (&Tensor, f32),
        w: &PackedLinear,
    ) -> Result<Tensor, OpError> {
        if !self.fuses_prologue(x.rows(), w) {
            return self.linear(&self.add_rms_norm(x, delta, norm, eps)?, w);
        }
        let (delta, norm) = (delta.mat()?, norm.mat()?);
        self.launch_with_prologue(LinearPrologue::AddNorm { x: x.mat_mut()?, delta, norm, eps }, w)
    }

    /// `y = (silu(gate) · up) Wᵀ + bias`: `x [T, 2 K]` holds the gate columns first; `y [T, N]`.
    pub fn silu_mul_linear(&self, x: &Tensor, w: &PackedLinear) -> Result<Tensor, OpError> {
        if !self.fuses_prologue(x.rows(), w) {
            return self.linear(&self.silu_mul(x)?, w);
        }
        self.launch_with_prologue(LinearPrologue::SiluMul(x.mat()?), w)
    }

    fn launch_with_prologue(
        &self,
        before: LinearPrologue<'_>,
        w: &PackedLinear,
    ) -> Result<Tensor, OpError> {
        let mut y = self.scratch(self.dtype(), &[before.rows(), w.outputs()])?;
        let bias = w.bias.as_ref().map(|b| b.mat()).transpose()?;
        self.device.linear_with_prologue(&self.stream, y.mat_mut()?, before, &w.weight, bias)?;
        Ok(y)
    }

    fn launch_fused_linear(
        &self,
        x: &Tensor,
        w: &PackedLinear,
        around: LinearFusion<'_>,
        outputs: usize,
    ) -> Result<Tensor, OpError> {
        let mut y = self.scratch(x.dtype(), &[x.rows(), outputs])?;
        let bias = w.bias.as_ref().map(|b| b.mat()).transpose()?;
        let around = LinearFusion { bias, prefetch: w.prefetch(), ..around };
        let (s, out) = (&self.stream, y.mat_mut()?);
        self.device.fused_linear(s, out, x.mat()?, &w.weight, &around)?;
        Ok(y)
    }
}
