//! NVML and the look at host memory, as a controller asks them: one question after the other. What
//! is read may be delivered later, when it is not true any more.

use affinode_proto::reason::Reason;

use super::{
    super::{Effect, GpuSample, Input, Survey, host_memory::MemoryPool},
    world::World,
};

type Reading = Result<Vec<GpuSample>, String>;
type HostReading = Result<Vec<MemoryPool>, (Reason, String)>;

/// What NVML and the node answer.
#[derive(Default)]
pub(super) struct Nvml {
    /// It answers with an error.
    pub(super) fails: bool,
    /// No container finds the host memory to leave.
    pub(super) no_host_memory: bool,
    /// Read and not delivered yet: for which question, `None` for the reading of each tick.
    in_flight: Option<(Option<Effect>, Reading, HostReading)>,
}

impl World {
    fn reading(&self) -> Reading {
        match self.nvml.fails {
            true => Err("NVML does not answer".into()),
            false => Ok(self.gpus()),
        }
    }

    /// NVML is read for the question that was asked first, or for a tick. The answer comes later.
    pub(super) fn read_nvml(&mut self) {
        if self.nvml.in_flight.is_none() {
            let question = self.questions.pop_front();
            let host = self.host_reading(question.as_ref());
            self.nvml.in_flight = Some((question, self.reading(), host));
        }
    }

    fn host_reading(&self, question: Option<&Effect>) -> HostReading {
        match question {
            _ if self.nvml.no_host_memory => Err((Reason::HostMemory, String::new())),
            Some(Effect::Survey { processes, .. }) => Ok(self.host_pools(processes)),
            _ => Ok(Vec::new()),
        }
    }

    /// Whether a question was asked and not answered.
    pub(super) fn is_asked(&self) -> bool {
        self.nvml.in_flight.is_some() || !self.questions.is_empty()
    }

    /// What was read is delivered; or a question is answered at once.
    pub(super) fn answer_question(&mut self) {
        self.read_nvml();
        let Some((question, reading, host)) = self.nvml.in_flight.take() else { return };
        match question {
            Some(Effect::Survey { key, .. }) => {
                self.feed(Input::Surveyed(key, Survey { gpus: reading, host }));
            }
            Some(Effect::Prove(key, number)) => self.feed(Input::Proven(key, number, reading)),
            _ => self.feed(Input::Gpus(reading)),
        }
    }

    /// The reading of a tick, unless the one before is on its way.
    pub(super) fn answer_tick(&mut self) {
        if self.nvml.in_flight.is_none() {
            let reading = self.reading();
            self.feed(Input::Gpus(reading));
        }
    }

    /// Of a controller that has died no question is answered.
    pub(super) fn forget_questions(&mut self) {
        self.questions.clear();
        self.nvml.in_flight = None;
    }
}
