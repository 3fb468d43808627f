//! Traces, which state the times at which each process makes calls.
//!
//! | format | columns |
//! | --- | --- |
//! | `servegen` | `client,ts,rate,cv,pat,p1,p2`: windows of ten minutes, the distribution of pauses in each |
//! | `azure` | `TIMESTAMP,...`: one request per line, one process per file |
//! | `telemetry` | `time,process,busy,vram_bytes`: seconds, busy share of the time to the next row |
//! | `requests` | `time,process`: seconds, one request a line |
//!
//! The formats `telemetry` and `requests` may have one more column, `gpu`: a name that is unique in
//! the trace. A process is on the GPU of its first row.
//!
//! A ServeGen window has exactly rate x 600 requests. The pauses between them are drawn from the
//! distribution fitted to the window. If all pauses take less time than the window, the requests
//! are a burst at a random position in it.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Read},
    path::Path,
};

use super::{SimulationError, random::RandomSource};

/// One process of a trace: its memory, its GPU and the times of its calls.
#[derive(Clone, Debug, Default)]
pub struct TraceLoad {
    /// Name of the process in the trace.
    pub name: String,
    /// Namespace of the process, which selects policy rules. Empty: the trace has no namespaces.
    pub namespace: String,
    /// Name of the process's GPU. Empty: the trace names no GPU.
    pub gpu: String,
    /// Number of the GPU on which the process was placed ([`super::placement`]).
    pub gpu_number: usize,
    /// VRAM of the process, in bytes.
    pub vram_bytes: u64,
    /// Time for which a call keeps the GPU busy, in milliseconds.
    pub service_ms: u32,
    /// Times of the process's calls, in milliseconds since the start of the trace, in order.
    pub arrivals_ms: Vec<u32>,
}

/// Minimum time without a call, in milliseconds, from which it follows that a process does not
/// exist: before its first call, or after its last call. The value is a day, because a shorter
/// pause could be a night without use.
const ENDED_MS: u64 = 86_400_000;

impl TraceLoad {
    /// Whether the process starts during the trace: its first call is more than a day after the
    /// start of the trace. Otherwise it exists from the start.
    #[must_use]
    pub fn starts_late(&self) -> bool {
        self.arrivals_ms.first().is_some_and(|first| u64::from(*first) > ENDED_MS)
    }

    /// Time at which the process ends, in milliseconds. It ends after its last call, if this call
    /// is more than a day before the end of the trace. `None`: the process exists until the end of
    /// the trace.
    #[must_use]
    pub fn exit_ms(&self, end_ms: u64) -> Option<u64> {
        let last = u64::from(*self.arrivals_ms.last()?) + u64::from(self.service_ms);
        (last + ENDED_MS < end_ms).then_some(last)
    }
}

/// A trace: the processes of a node with their calls.
#[derive(Clone, Debug, Default)]
pub struct WorkloadTrace {
    /// The processes of the trace, each with its memory and the times of its calls.
    pub loads: Vec<TraceLoad>,
}

/// Values that are assumed if the trace does not contain them.
#[derive(Clone, Copy, Debug)]
pub struct TraceDefaults {
    /// VRAM of a process, in bytes.
    pub vram_bytes: u64,
    /// Time for which a call keeps the GPU busy, in milliseconds.
    pub service_ms: u32,
    /// Seed of the random numbers.
    pub seed: u64,
}

const WINDOW_S: f64 = 600.0;
/// Maximum number of requests in a trace. It limits the memory that a trace needs.
const MAX_REQUESTS: usize = 50_000_000;

impl WorkloadTrace {
    /// Reads a trace from a file, which may be compressed (`.gz`). The first line determines the
    /// format.
    ///
    /// # Errors
    /// The file cannot be read, or a line is invalid.
    pub fn read(path: &Path, assumed: TraceDefaults) -> Result<WorkloadTrace, SimulationError> {
        let shown = path.display().to_string();
        let fail = |source| SimulationError::Read { path: shown.clone(), source };
        let file = std::fs::File::open(path).map_err(fail)?;
        let plain: Box<dyn Read> = if path.extension().is_some_and(|ending| ending == "gz") {
            Box::new(flate2::read::MultiGzDecoder::new(file))
        } else {
            Box::new(file)
        };
        WorkloadTrace::parse(plain, &shown, assumed)
    }

    /// Parses a trace. `shown` is the name of the trace in errors.
    ///
    /// # Errors
    /// A line is invalid.
    pub fn parse(
        plain: impl Read,
        shown: &str,
        assumed: TraceDefaults,
    ) -> Result<WorkloadTrace, SimulationError> {
        let fail = |source| SimulationError::Read { path: shown.to_owned(), source };
        let path = || shown.to_owned();
        let mut lines = BufReader::new(plain).lines();
        let header = lines.next().transpose().map_err(fail)?.unwrap_or_default();
        let mut reader = TraceRows {
            assumed,
            random: RandomSource::new(assumed.seed),
            loads: BTreeMap::new(),
            zero: None,
            drawn: 0,
        };
        let row: fn(&mut TraceRows, &[&str]) -> Option<()> = match header
            .trim_start_matches('\u{feff}')
        {
            h if h.starts_with("client,ts,rate") => TraceRows::servegen,
            h if h.starts_with("TIMESTAMP") => TraceRows::azure,
            h if h.starts_with("time,process,busy") => TraceRows::telemetry,
            h if h.starts_with("time,process,gpu") => TraceRows::request_on_gpu,
            h if h.starts_with("time,process") => TraceRows::request,
            _ => {
                let what = "unknown header; accepted: client,ts,rate,cv,pat,p1,p2; TIMESTAMP,...; time,process,busy,vram_bytes[,gpu]; time,process[,gpu]".into();
                return Err(SimulationError::Line { path: path(), line: 1, what });
            }
        };
        for (line, number) in lines.zip(2..) {
            let line = line.map_err(fail)?;
            let cells: Vec<&str> = line.trim().split(',').collect();
            if cells != [""] && row(&mut reader, &cells).is_none() {
                let what = format!(
                    "the line {:?} does not match the header",
                    line.chars().take(80).collect::<String>()
                );
                return Err(SimulationError::Line { path: path(), line: number, what });
            }
        }
        WorkloadTrace { loads: reader.loads.into_values().collect() }.checked()
    }

    /// Sorts the calls of the trace, and removes processes without calls.
    ///
    /// # Errors
    /// The trace has no request.
    pub fn checked(mut self) -> Result<WorkloadTrace, SimulationError> {
        self.loads.retain(|load| !load.arrivals_ms.is_empty());
        self.loads.iter_mut().for_each(|load| load.arrivals_ms.sort_unstable());
        if self.loads.is_empty() { Err(SimulationError::Empty) } else { Ok(self) }
    }

    /// VRAM of all processes of the trace, in bytes.
    #[must_use]
    pub fn vram_bytes(&self) -> u64 {
        self.loads.iter().map(|load| load.vram_bytes).sum()
    }

    /// Time of the last call in the trace, in milliseconds.
    #[must_use]
    pub fn end_ms(&self) -> u64 {
        self.loads
            .iter()
            .filter_map(|load| load.arrivals_ms.last())
            .max()
            .copied()
            .unwrap_or(0)
            .into()
    }

    /// The shortest pause above zero between two calls of one process, in milliseconds. It shows
    /// the resolution of the trace. `None`: the trace has too few calls.
    #[must_use]
    pub fn step_ms(&self) -> Option<u64> {
        const MIN_REQUESTS: u64 = 100;
        let pauses = self.loads.iter().flat_map(|load| load.arrivals_ms.windows(2));
        let pauses = pauses.map(|pair| u64::from(pair[1] - pair[0])).filter(|pause| *pause > 0);
        pauses.min().filter(|_| self.requests() >= MIN_REQUESTS)
    }

    /// Number of calls of all processes in the trace.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.loads.iter().map(|load| load.arrivals_ms.len() as u64).sum()
    }
}

struct TraceRows {
    assumed: TraceDefaults,
    random: RandomSource,
    loads: BTreeMap<String, TraceLoad>,
    zero: Option<f64>,
    /// Number of requests generated so far.
    drawn: usize,
}

/// Converts seconds to milliseconds of a trace. `None`: the result does not fit, because it is
/// above 49 days.
fn ms(seconds: f64) -> Option<u32> {
    let ms = seconds * 1000.0;
    (ms.is_finite() && (0.0..=f64::from(u32::MAX)).contains(&ms)).then_some(ms.round() as u32)
}

impl TraceRows {
    fn load(&mut self, name: &str) -> &mut TraceLoad {
        let TraceDefaults { vram_bytes, service_ms, .. } = self.assumed;
        self.loads.entry(name.to_owned()).or_insert_with(|| TraceLoad {
            name: name.to_owned(),
            vram_bytes,
            service_ms,
            ..TraceLoad::default()
        })
    }

    fn servegen(&mut self, cells: &[&str]) -> Option<()> {
        let [client, start, rate, _, pattern, p1, p2] = cells else { return None };
        let number = |text: &str| text.parse::<f64>().ok().filter(|n| n.is_finite());
        let (start, rate, p1, p2) = (number(start)?, number(rate)?, number(p1)?, number(p2)?);
        if !(0.0..1e5).contains(&rate)
            || p1 <= 0.0
            || p2 <= 0.0
            || !["Gamma", "Weibull"].contains(pattern)
        {
            return None;
        }
        let requests = (rate * WINDOW_S).round() as usize;
        self.drawn = self.drawn.saturating_add(requests);
        if self.drawn > MAX_REQUESTS {
            return None;
        }
        let random = &mut self.random;
        let pauses: Vec<f64> = (1..requests)
            .map(
                |_| if *pattern == "Gamma" { random.gamma(p1, p2) } else { random.weibull(p1, p2) },
            )
            .collect();
        let drawn: f64 = pauses.iter().sum();
        // A fitted gamma distribution has the mean of its data.
        let span = if *pattern == "Gamma" { p1 * p2 * pauses.len() as f64 } else { drawn };
        let span = span.min(WINDOW_S);
        let scale = if drawn > 0.0 { span / drawn } else { 0.0 };
        let mut at = start + random.unit() * (WINDOW_S - span);
        let mut arrivals = Vec::with_capacity(requests);
        arrivals.push(ms(at)?);
        for pause in pauses {
            at += pause * scale;
            arrivals.push(ms(at)?);
        }
        arrivals.truncate(requests);
        self.load(client).arrivals_ms.append(&mut arrivals);
        Some(())
    }

    fn azure(&mut self, cells: &[&str]) -> Option<()> {
        let (date, time) = cells.first()?.split_once(' ')?;
        let day: f64 = date.rsplit('-').next()?.parse().ok()?;
        let mut parts = time.split(':').map(|part| part.parse::<f64>().ok());
        let (h, m, s) = (parts.next()??, parts.next()??, parts.next()??);
        let at = day * 86_400.0 + h * 3600.0 + m * 60.0 + s;
        let zero = *self.zero.get_or_insert(at);
        self.load("azure").arrivals_ms.push(ms(at - zero)?);
        Some(())
    }

    fn telemetry(&mut self, cells: &[&str]) -> Option<()> {
        let [time, process, busy, vram, gpu @ ..] = cells else { return None };
        let (at, busy, vram) =
            (time.parse::<f64>().ok()?, busy.parse::<f64>().ok()?, vram.parse::<u64>().ok()?);
        let zero = *self.zero.get_or_insert(at);
        let at = ms(at - zero)?;
        let first = !self.loads.contains_key(*process);
        let load = self.load(process);
        load.vram_bytes = if first { vram } else { load.vram_bytes.max(vram) };
        if busy > 0.0 {
            load.arrivals_ms.push(at);
        }
        if let (true, Some(gpu)) = (first, gpu.first()) {
            load.gpu = (*gpu).to_owned();
        }
        Some(())
    }

    fn request(&mut self, cells: &[&str]) -> Option<()> {
        let (time, process) = (cells.first()?.parse::<f64>().ok()?, cells.get(1)?);
        let zero = *self.zero.get_or_insert(time);
        let at = ms(time - zero)?;
        self.load(process).arrivals_ms.push(at);
        Some(())
    }

    fn request_on_gpu(&mut self, cells: &[&str]) -> Option<()> {
        self.request(cells)?;
        let (process, gpu) = (cells.get(1)?, cells.get(2)?);
        let load = self.load(process);
        if load.gpu.is_empty() {
            load.gpu = (*gpu).to_owned();
        }
        Some(())
    }
}
