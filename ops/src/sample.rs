//! Choosing tokens out of logits.

pub use kernels::sample::{
    Draw, Edits, Logprobs, Pick, Picked, RowAnswer, RowRequest, Rules, Seen, Unusable,
};

use kernels::DType;

use crate::error::check_size;
use crate::{OpError, Ops, Tensor};

impl Ops {
    /// One answer per row of `logits`, f32 `[n, V]`: a token by the rules of its request, or the
    /// log-probability of a known one. A row with strange logits fails alone.
    ///
    /// Errors: `OpError` if rows and requests differ in number, the logits are not f32, or a known
    /// token lies outside the vocabulary.
    pub fn sample(
        &self,
        logits: &Tensor,
        rows: &[RowRequest<'_>],
    ) -> Result<Vec<RowAnswer>, OpError> {
        check_size("sample", "rows", rows.len(), logits.rows())?;
        if logits.dtype() != DType::F32 {
            let (op, what) = ("sample", "logits");
            return Err(OpError::Dtype { op, what, dtype: logits.dtype() });
        }
        for row in rows {
            if let Pick::Known(token) = row.pick
                && token as usize >= logits.cols()
            {
                let (got, expected) = (vec![token as usize], vec![logits.cols()]);
                return Err(OpError::Shape { op: "sample", what: "token", got, expected });
            }
        }
        Ok(self.device.sample(&self.stream, logits.mat()?, rows)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::cpu::{CpuConfig, CpuDevice};
    use std::sync::Arc;

    #[test]
    fn answers_and_refusals() {
        let config = CpuConfig { threads: 2, ..CpuConfig::default() };
        let ops = Ops::new(Arc::new(CpuDevice::new(config).unwrap()), DType::F32).unwrap();
        let l = [0.0, 2.0, 1.0, f32::NAN, 0.0, 0.0];
        let logits = ops.floats(&l, DType::F32, &[2, 3]).unwrap();
        let greedy = Pick::Choose(Rules { edits: Edits::default(), draw: None });
        let row = |pick, logprobs| RowRequest { pick, logprobs };
        let answers = ops.sample(&logits, &[row(greedy, None), row(greedy, None)]).unwrap();
        assert_eq!(answers[0], Ok(Picked { token: 1, logprobs: None }));
        assert_eq!(answers[1], Err(Unusable::NonFinite));
        let rows = [row(Pick::Known(2), Some(2)), row(greedy, None)];
        let scored = ops.sample(&logits, &rows).unwrap()[0].clone().unwrap();
        let logprobs = scored.logprobs.unwrap();
        assert_eq!((scored.token, logprobs.rank, logprobs.top[0].0), (2, 2, 1));
        assert!(ops.sample(&logits, &rows[..1]).is_err(), "too few requests");
        let outside = [row(Pick::Known(3), None), row(greedy, None)];
        assert!(ops.sample(&logits, &outside).is_err(), "no such token");
    }
}
