//! The table that leads each kernel of the trait to its file.

use super::device::HipDevice;
use super::error::HipError;
use crate::step::{AnswerArrays, SeatArrays, StageView, StepArrays};
use crate::{
    Attention, Buffer, DType, DeviceError, Experts, HostMat, Kernels, KvLayout, Mat, MatMut,
    Packed, QkRope, Routes, Stream,
};

/// What a kernel answers that exists elsewhere, but not here.
fn no_kernel(kernel: &'static str) -> Result<(), DeviceError> {
    Err(HipError::NoKernel { kernel }.into())
}

#[allow(unused_variables, reason = "arguments of kernels that do not exist yet")]
impl Kernels for HipDevice {
    fn pack(&self, parts: &[HostMat<'_>], dtype: DType) -> Result<Packed, DeviceError> {
        Err(HipError::NoKernel { kernel: "pack" }.into())
    }

    fn linear(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        w: &Packed,
        bias: Option<Mat<'_>>,
    ) -> Result<(), DeviceError> {
        no_kernel("linear")
    }

    fn embed(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        ids: Mat<'_>,
        table: Mat<'_>,
        first: usize,
    ) -> Result<(), DeviceError> {
        no_kernel("embed")
    }

    fn embed_packed(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        ids: Mat<'_>,
        table: &Packed,
        first: usize,
    ) -> Result<(), DeviceError> {
        no_kernel("embed_packed")
    }

    fn rms_norm(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        w: Mat<'_>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        no_kernel("rms_norm")
    }

    fn add_rms_norm(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: MatMut<'_>,
        delta: Mat<'_>,
        w: Mat<'_>,
        eps: f32,
    ) -> Result<(), DeviceError> {
        no_kernel("add_rms_norm")
    }

    fn qk_norm_rope_kv_write(
        &self,
        s: &Stream,
        q: MatMut<'_>,
        kv: (&mut Buffer, &KvLayout),
        args: &QkRope<'_>,
    ) -> Result<(), DeviceError> {
        no_kernel("qk_norm_rope_kv_write")
    }

    fn paged_attention(
        &self,
        s: &Stream,
        o: MatMut<'_>,
        kv: (&Buffer, &KvLayout),
        args: &Attention<'_>,
    ) -> Result<(), DeviceError> {
        no_kernel("paged_attention")
    }

    fn silu_mul(&self, s: &Stream, y: MatMut<'_>, x: Mat<'_>) -> Result<(), DeviceError> {
        no_kernel("silu_mul")
    }

    fn add(&self, s: &Stream, y: MatMut<'_>, a: Mat<'_>, b: Mat<'_>) -> Result<(), DeviceError> {
        no_kernel("add")
    }

    fn gather_rows(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        rows: Mat<'_>,
    ) -> Result<(), DeviceError> {
        no_kernel("gather_rows")
    }

    fn moe_route_softmax(
        &self,
        s: &Stream,
        experts: MatMut<'_>,
        weights: MatMut<'_>,
        logits: Mat<'_>,
        normalise: bool,
    ) -> Result<(), DeviceError> {
        no_kernel("moe_route_softmax")
    }

    fn moe_mlp(
        &self,
        s: &Stream,
        y: MatMut<'_>,
        x: Mat<'_>,
        routes: &Routes<'_>,
        experts: &Experts<'_>,
    ) -> Result<(), DeviceError> {
        no_kernel("moe_mlp")
    }

    fn prepare(
        &self,
        s: &Stream,
        stage: &StageView<'_>,
        seats: &mut SeatArrays<'_>,
        step: &mut StepArrays<'_>,
        block_tokens: usize,
    ) -> Result<(), DeviceError> {
        no_kernel("prepare")
    }

    fn sample_rows(
        &self,
        s: &Stream,
        logits: Mat<'_>,
        stage: &StageView<'_>,
        seats: &mut SeatArrays<'_>,
        answers: &mut AnswerArrays<'_>,
    ) -> Result<(), DeviceError> {
        no_kernel("sample_rows")
    }
}
