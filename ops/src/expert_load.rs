//! How many tokens each expert gets, counted on the device where routers choose.

use std::cell::RefCell;
use std::sync::mpsc::{Receiver, Sender, channel};

use device::{CopyInFlight, DType, PinnedBuffer};
use kernels::ExpertLoadArgs;

use crate::{OpError, Ops, Tensor};

/// Numbers that may be on their way to the host at a time.
const IN_FLIGHT: usize = 3;

/// Tokens by layer and expert since they were last taken.
#[derive(Debug)]
pub struct ExpertLoadCounters {
    tokens: RefCell<Tensor>, // i32 [layers, E]
    memory: (Sender<PinnedBuffer>, Receiver<PinnedBuffer>),
}

/// Where the router of one layer counts.
#[derive(Debug, Clone, Copy)]
pub struct LayerLoadCounter<'a> {
    /// Of all layers.
    pub counts: &'a ExpertLoadCounters,
    /// Which one it is.
    pub layer: usize,
    /// i64 `[T]`: tokens without a slot (-1) are padding. `None` = no token is.
    pub slots: Option<&'a Tensor>,
}

/// Numbers on their way to the host.
#[derive(Debug)]
pub struct ExpertLoadDownload {
    copy: CopyInFlight,
    layers: usize,
    experts: usize,
    home: Sender<PinnedBuffer>,
}

impl ExpertLoadCounters {
    /// For `experts` in each of `layers`.
    pub fn new(ops: &Ops, layers: usize, experts: usize) -> Result<Self, OpError> {
        let (home, memory) = channel();
        for _ in 0..IN_FLIGHT {
            // The receiver lives in the same struct.
            let _ = home.send(ops.device.alloc_pinned(layers * experts * size_of::<u32>())?);
        }
        let tokens = RefCell::new(ops.zeros(DType::I32, &[layers, experts])?);
        Ok(Self { tokens, memory: (home, memory) })
    }

    /// Begins to bring the numbers to the host, in the order of launches, and counts anew from there on. `None` = so many
    /// are under way that these stay for the next time.
    pub fn take(&self, ops: &Ops) -> Result<Option<ExpertLoadDownload>, OpError> {
        let Ok(memory) = self.memory.1.try_recv() else { return Ok(None) };
        let mut tokens = self.tokens.borrow_mut();
        let (layers, experts, bytes) = (tokens.rows(), tokens.cols(), tokens.len() * 4);
        let copy = ops.device.start_download(&ops.stream, tokens.buffer(), memory, bytes)?;
        ops.device.zero(&ops.stream, tokens.buffer_mut()?)?;
        Ok(Some(ExpertLoadDownload { copy, layers, experts, home: self.memory.0.clone() }))
    }
}

impl ExpertLoadDownload {
    /// Waits for them: layer, expert and tokens of all that got any, in order.
    pub fn wait(self) -> Result<Vec<(usize, usize, u32)>, OpError> {
        let memory = self.copy.wait()?;
        let words = memory.bytes().as_chunks::<4>().0[..self.layers * self.experts].iter();
        let tokens = words.map(|word| u32::from_ne_bytes(*word)).enumerate();
        let of = |(at, tokens)| (at / self.experts, at % self.experts, tokens);
        let counted = tokens.filter(|(_, tokens)| *tokens > 0).map(of).collect();
        let _ = self.home.send(memory); // Nobody counts any more where nobody needs it.
        Ok(counted)
    }
}

impl LayerLoadCounter<'_> {
    /// Lets a kernel add to the numbers, if there are any.
    pub(crate) fn with<T>(
        counting: Option<Self>,
        work: impl FnOnce(Option<&mut ExpertLoadArgs<'_>>) -> Result<T, OpError>,
    ) -> Result<T, OpError> {
        let Some(Self { counts, layer, slots }) = counting else { return work(None) };
        let slots = slots.map(Tensor::mat).transpose()?;
        let mut tokens = counts.tokens.borrow_mut();
        work(Some(&mut ExpertLoadArgs { tokens: tokens.mat_mut()?, layer, slots }))
    }
}
