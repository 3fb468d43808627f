//! The baselines: the policies that a simulation runs on the same trace in order to compare them.
//! The configured policy is one of them.

use affinode_core::{
    Millis, Settings,
    policy::{Engine, KeepAlive, Mode, NamespaceRule, Policies, Policy},
    victims::VictimRule,
};

/// What a simulated policy knows in advance about the calls in the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallForesight {
    /// The policy has no knowledge of the future.
    None,
    /// The policy knows when each container is used next, and chooses victims by this time.
    Victims,
    /// The policy knows when each container is used next, and chooses victims by this time. If a
    /// pause will be long, the policy offloads the container at the begin of the pause.
    Pauses,
}

/// A policy that a simulation compares with other policies.
#[derive(Clone, Debug)]
pub struct Baseline {
    /// Name of the policy in the results.
    pub name: String,
    /// The settings of the node. `None`: nothing is offloaded.
    pub settings: Option<Settings>,
    /// What the policy knows in advance about the calls in the trace.
    pub foresight: CallForesight,
    /// Whether the policy ends processes and starts them again, in place of offloads and restores.
    pub reloads: bool,
}

impl Baseline {
    /// The shortest idle timeout of the node and its namespaces, in milliseconds. `None`: the
    /// policy offloads no container for idleness.
    #[must_use]
    pub fn shortest_timeout_ms(&self) -> Option<Millis> {
        let policies = &self.settings.as_ref()?.policies;
        let rules = policies.rules.iter().map(|rule| policies.before_annotations(&rule.name));
        let leaves = |policy: &Policy| matches!(policy.mode, Mode::Eager | Mode::Auto);
        let all = rules.chain([policies.node.clone()]).filter(leaves);
        all.map(|policy| policy.idle_timeout_ms).min()
    }
}

fn simulated(settings: Settings) -> Settings {
    Settings { hold: false, ..settings }
}

fn plain(settings: &Settings, change: impl FnOnce(&mut Policy), victims: VictimRule) -> Settings {
    let mut node = settings.policies.node.clone();
    (node.keep_alive, node.prewake) = (KeepAlive::Fixed, false);
    change(&mut node);
    // Each container keeps its engine, so that only the compared policy differs.
    let engine_of = |rule: &NamespaceRule| NamespaceRule {
        name: rule.name.clone(),
        engine: rule.engine.clone(),
        ..NamespaceRule::default()
    };
    let rules = settings.policies.rules.iter().map(engine_of).collect();
    let policies = Policies { node, rules, ..Policies::default() };
    simulated(Settings { policies, victims, ..settings.clone() })
}

/// Changes the settings for a policy that ends processes and does not offload them. The engine
/// becomes `checkpoint` everywhere. With this engine, an offload frees all VRAM of a process at
/// once, as the end of the process does.
fn ends_whole(mut settings: Settings) -> Settings {
    settings.policies.node.engine = Engine::Checkpoint;
    settings.policies.rules.clear();
    settings
}

/// Creates all baselines, which are the policies to compare. The first is the configured policy.
#[must_use]
pub fn all(settings: &Settings, seed: u64) -> Vec<Baseline> {
    let contender = |name: String, settings: Option<Settings>| Baseline {
        name,
        settings,
        foresight: CallForesight::None,
        reloads: false,
    };
    let timeout = |seconds: Millis| {
        let change = |p: &mut Policy| (p.mode, p.idle_timeout_ms) = (Mode::Eager, seconds * 1000);
        plain(settings, change, VictimRule::Lru)
    };
    let pressed = |rule| plain(settings, |p: &mut Policy| p.mode = Mode::Pressure, rule);
    let mut all = vec![
        contender("configured".into(), Some(simulated(settings.clone()))),
        contender("static".into(), None),
    ];
    for (name, seconds) in
        [("30s", 30), ("60s", 60), ("2m", 120), ("5m", 300), ("10m", 600), ("30m", 1800)]
    {
        all.push(contender(format!("fixed-{name}"), Some(timeout(seconds))));
    }
    let learned = |p: &mut Policy| {
        (p.mode, p.keep_alive, p.prewake) = (Mode::Eager, KeepAlive::Learned, true);
    };
    all.push(contender("learned".into(), Some(plain(settings, learned, VictimRule::Expected))));
    all.push(contender("lru".into(), Some(pressed(VictimRule::Lru))));
    all.push(contender("random".into(), Some(pressed(VictimRule::Random(seed)))));
    all.push(contender("size-idle".into(), Some(pressed(VictimRule::SizeIdle))));
    all.push(contender("learned-pressure".into(), Some(pressed(VictimRule::Expected))));
    all.push(Baseline {
        reloads: true,
        ..contender("kill-reload-5m".into(), Some(ends_whole(timeout(300))))
    });
    let oracle = |name: &str, foresight| Baseline {
        foresight,
        ..contender(name.into(), Some(pressed(VictimRule::Expected)))
    };
    all.push(oracle("clairvoyant", CallForesight::Victims));
    all.push(oracle("clairvoyant-eager", CallForesight::Pauses));
    all
}
