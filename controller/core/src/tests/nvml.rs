//! Simulates NVML and the survey of host memory. Requests of the controller are answered one after
//! the other. A result may be delivered later, when it is no longer true.

use affinode_proto::reason::Reason;

use super::{
    super::{
        Effect, GpuSample, Input,
        harness::{HostReading, Reading, answer},
        host_memory::SurveyedMemory,
    },
    world::{Host, World},
};

/// Error of a GPU that cannot be read.
pub(super) const LOST: &str = "the GPU is lost";

/// State of the simulated NVML and of the surveys.
#[derive(Default)]
pub(super) struct Nvml {
    /// Whether every reading fails with an error.
    pub(super) fails: bool,
    /// The GPU for which readings have only an error.
    pub(super) unreadable: Option<usize>,
    /// The GPU that readings do not list.
    pub(super) unlisted: Option<usize>,
    /// Whether every survey reports too little host memory for an offload.
    pub(super) no_host_memory: bool,
    /// The result that is not delivered yet, and the request for it. `None` in place of a request:
    /// the reading is for a tick.
    in_flight: Option<(Option<Effect>, Reading, HostReading)>,
}

impl World {
    fn reading(&self) -> Reading {
        match self.nvml.fails {
            true => Err("NVML does not answer".into()),
            false => Ok(self.read_gpus()),
        }
    }

    fn read_gpus(&self) -> Vec<GpuSample> {
        let mut gpus = self.gpus();
        if let Some(lost) = self.nvml.unreadable {
            let (uuid, error) = (gpus[lost].uuid.clone(), Some(LOST.to_owned()));
            gpus[lost] = GpuSample { uuid, error, ..GpuSample::default() };
        }
        if let Some(lost) = self.nvml.unlisted {
            gpus.remove(lost);
        }
        gpus
    }

    /// Reads NVML for the oldest open request, or for a tick if no request is open. The result is
    /// stored and delivered later. Does nothing while an earlier result is not delivered.
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
            Some(Effect::Survey { processes, host_pool, .. }) => {
                let mut memory = self.host_pools(processes);
                memory.host_pool.retain(|_| *host_pool);
                Ok(memory)
            }
            _ => Ok(SurveyedMemory::default()),
        }
    }

    /// Whether a request has not been answered yet.
    pub(super) fn is_asked(&self) -> bool {
        self.nvml.in_flight.is_some() || !self.questions.is_empty()
    }

    /// Delivers the stored result. If no result is stored, reads NVML first.
    pub(super) fn answer_question(&mut self) {
        self.read_nvml();
        let Some((question, reading, host)) = self.nvml.in_flight.take() else { return };
        self.feed(match question {
            Some(question) => answer(question, reading, host),
            None => Input::Gpus(reading),
        });
    }

    /// Delivers a reading for a tick. Does nothing while an earlier result is not delivered.
    pub(super) fn answer_tick(&mut self) {
        if self.nvml.in_flight.is_none() {
            let reading = self.reading();
            self.feed(Input::Gpus(reading));
        }
    }

    /// Drops the requests of a controller that has ended.
    pub(super) fn forget_questions(&mut self) {
        self.questions.clear();
        self.nvml.in_flight = None;
    }
}
