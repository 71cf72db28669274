//! Who makes the masks of a constrained request: usually in time, sometimes late, and then ahead for a while.

use crate::client::Stage;
use crate::happening::Happening;
use crate::requests::masked;
use crate::world::World;
use protocol::RequestId;
use scheduler::Event;

/// Longest time that a late mask takes.
const MASK_MS: u64 = 40;

/// The maker of one request's masks. A mask is named by the tokens of the output in front of it.
#[derive(Debug, Default)]
pub(crate) struct MaskMaker {
    /// Whether it begins with the tokens, not with the step, and says when each mask is there.
    ahead: bool,
    /// Whether the one it works on is missed by a step.
    missed: bool,
    working_on: Option<u32>,
    made: Option<u32>,
    /// Whether the scheduler is told that there will be none any more.
    over: bool,
}

impl World {
    /// Whether a step that has just been sent has to do without a request's mask, whose maker then says when it is
    /// there, be that before or after the step is answered.
    pub(crate) fn is_late(&mut self, request: RequestId) -> bool {
        let late = self.chance.hits(self.setup.faults.late);
        let client = &mut self.clients[request.0 as usize - 1];
        let outputs = client.outputs();
        let maker = &mut client.masks;
        if !late || maker.made == Some(outputs) {
            return false;
        }
        (maker.ahead, maker.missed) = (true, true);
        self.tally.late_masks += 1;
        self.begin_mask(request, outputs);
        true
    }

    /// Tokens came: a maker that works ahead begins the next mask.
    pub(crate) fn make_mask_ahead(&mut self, index: usize) {
        let client = &self.clients[index];
        if client.masks.ahead && client.stage == Stage::Live {
            self.begin_mask(client.id(), client.outputs());
        }
    }

    /// Tokens came: the masks of some requests end there, and the scheduler hears of it some time later.
    pub(crate) fn end_masks(&mut self, index: usize) {
        let client = &mut self.clients[index];
        let ends = masked(&client.submit).is_some_and(|tokens| tokens.end <= client.outputs());
        if ends && client.stage == Stage::Live && !std::mem::replace(&mut client.masks.over, true) {
            let (request, at_ms) = (client.id(), self.now_ms + self.chance.below(MASK_MS));
            self.agenda.add(at_ms, Happening::MasksOver { request });
            self.tally.ended_masks += 1;
        }
    }

    fn begin_mask(&mut self, request: RequestId, outputs: u32) {
        let maker = &mut self.clients[request.0 as usize - 1].masks;
        if maker.working_on.replace(outputs) != Some(outputs) {
            let at_ms = self.now_ms + self.chance.below(MASK_MS);
            self.agenda.add(at_ms, Happening::MaskMade { request, outputs });
        }
    }

    /// A mask that was begun is there.
    pub(crate) fn mask_made(&mut self, request: RequestId, outputs: u32) {
        let calms_down = self.chance.hits(200);
        let maker = &mut self.clients[request.0 as usize - 1].masks;
        if maker.working_on != Some(outputs) {
            return;
        }
        maker.ahead = maker.missed || !calms_down;
        (maker.missed, maker.working_on, maker.made) = (false, None, Some(outputs));
        let ahead = maker.ahead;
        self.trace.note(self.now_ms, "mask", &[request.0, outputs.into(), ahead.into()]);
        self.inbox.push(Event::MaskMade { request, outputs, ahead });
    }
}
