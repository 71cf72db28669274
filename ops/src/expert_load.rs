//! Expert load (EPLB statistics): number of tokens per expert, counted on the device by the routing kernels.

use std::cell::RefCell;
use std::sync::mpsc::{Receiver, Sender, channel};

use device::{CopyInFlight, DType, PinnedBuffer};
use kernels::ExpertLoadArgs;

use crate::{OpError, Ops, Tensor};

/// Maximum number of copies of the token counts to the host that are in flight.
const IN_FLIGHT: usize = 3;

/// Expert load: token counts on the device by layer and expert, since their last copy to the host.
#[derive(Debug)]
pub struct ExpertLoadCounters {
    tokens: RefCell<Tensor>, // i32 [layers, experts]
    memory: (Sender<PinnedBuffer>, Receiver<PinnedBuffer>),
}

/// Counter of the tokens that one layer's router routes to each expert.
#[derive(Debug, Clone, Copy)]
pub struct LayerExpertLoadCounter<'a> {
    /// Token counts of all layers.
    pub counts: &'a ExpertLoadCounters,
    /// Index of the layer.
    pub layer: usize,
    /// KV slot of each token, i64 `[tokens]`: tokens with slot −1 are padding and are not counted. `None` =
    /// no token is padding.
    pub slots: Option<&'a Tensor>,
}

/// Token counts by expert (expert load) that are being copied to the host.
#[derive(Debug)]
pub struct ExpertLoadStatsDownload {
    copy: CopyInFlight,
    layers: usize,
    experts: usize,
    memory_return: Sender<PinnedBuffer>,
}

/// Number of tokens that were routed to one expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertLoadEntry {
    /// Index of the layer.
    pub layer: usize,
    /// Index of the expert in the layer.
    pub expert: usize,
    /// Number of tokens routed to the expert since the previous copy of the counts.
    pub tokens: u32,
}

impl ExpertLoadCounters {
    /// Allocates zeroed counts for `experts` experts in each of `layers` layers.
    pub fn new(ops: &Ops, layers: usize, experts: usize) -> Result<Self, OpError> {
        let (memory_return, memory) = channel();
        for _ in 0..IN_FLIGHT {
            // The send cannot fail, because `memory` is the receiver.
            let _ =
                memory_return.send(ops.device.alloc_pinned(layers * experts * size_of::<u32>())?);
        }
        let tokens = RefCell::new(ops.zeros(DType::I32, &[layers, experts])?);
        Ok(Self { tokens, memory: (memory_return, memory) })
    }

    /// Starts a copy of the counts to the host, in stream order, and resets the counts after the copy. `None`
    /// = the maximum number of copies is in flight, and the counts remain for the next call.
    pub fn take(&self, ops: &Ops) -> Result<Option<ExpertLoadStatsDownload>, OpError> {
        let Ok(memory) = self.memory.1.try_recv() else { return Ok(None) };
        let mut tokens = self.tokens.borrow_mut();
        let (layers, experts, bytes) = (tokens.rows(), tokens.cols(), tokens.len() * 4);
        let copy = ops.device.start_download(&ops.stream, tokens.buffer(), memory, bytes)?;
        ops.device.zero(&ops.stream, tokens.buffer_mut()?)?;
        Ok(Some(ExpertLoadStatsDownload {
            copy,
            layers,
            experts,
            memory_return: self.memory.0.clone(),
        }))
    }
}

impl ExpertLoadStatsDownload {
    /// Waits for the copy. Returns the counts of all experts with at least one token, by layer and expert.
    pub fn wait(self) -> Result<Vec<ExpertLoadEntry>, OpError> {
        let memory = self.copy.wait()?;
        let words = memory.bytes().as_chunks::<4>().0[..self.layers * self.experts].iter();
        let tokens = words.map(|word| u32::from_ne_bytes(*word)).enumerate();
        let entry = |(i, tokens)| ExpertLoadEntry {
            layer: i / self.experts,
            expert: i % self.experts,
            tokens,
        };
        let counts = tokens.filter(|(_, tokens)| *tokens > 0).map(entry).collect();
        // The send fails if the counters were dropped; the memory is not needed then.
        let _ = self.memory_return.send(memory);
        Ok(counts)
    }
}

impl LayerExpertLoadCounter<'_> {
    /// Calls `work`, which launches a routing kernel. Its argument is the token counts of the layer, which
    /// the kernel increases, or `None` if tokens are not counted.
    pub(crate) fn with<T>(
        counter: Option<Self>,
        work: impl FnOnce(Option<&mut ExpertLoadArgs<'_>>) -> Result<T, OpError>,
    ) -> Result<T, OpError> {
        let Some(Self { counts, layer, slots }) = counter else { return work(None) };
        let slots = slots.map(Tensor::mat).transpose()?;
        let mut tokens = counts.tokens.borrow_mut();
        work(Some(&mut ExpertLoadArgs { tokens: tokens.mat_mut()?, layer, slots }))
    }
}
