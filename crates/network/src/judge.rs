//! Runs a [`Decision`] to its end: asks, looks up, tells the audit, and registers what passed.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::audit::{About, Observer, Record};
use crate::config::{Config, Limits};
use crate::connector::Connector;
use crate::decide::{Decision, Destination, Finding, Mode, Refusal, Step, Subject};
use crate::decider::{Asking, Decider, Question};
use crate::policy::{Pass, Passed, Policy, is_anywhere};
use crate::rules::Rules;

pub(crate) struct Judge {
    policy: Arc<Policy>,
    mode: Mode,
    asking: Option<Asking>,
    connector: Arc<dyn Connector>,
    limits: Limits,
    observer: Arc<dyn Observer>,
}

impl Judge {
    pub(crate) fn new(
        config: &Config,
        policy: Arc<Policy>,
        decider: Option<Arc<dyn Decider>>,
        observer: Arc<dyn Observer>,
    ) -> Self {
        let asking = config.ask_timeout.zip(decider).map(|(timeout, decider)| Asking {
            decider,
            timeout: timeout.saturating_add(config.limits.answer_grace),
        });
        Self {
            policy,
            mode: config.mode,
            asking,
            connector: config.connector.clone(),
            limits: config.limits.clone(),
            observer,
        }
    }

    /// Judges one request. `client`: the address it came from, for the audit. `cut`: cancelled when the
    /// rules change so that the request would not pass any more.
    pub(crate) async fn judge(
        &self,
        subject: Subject<'_>,
        client: Option<&str>,
        cut: &CancellationToken,
    ) -> Result<(Destination, Pass), Refusal> {
        loop {
            let rules = self.policy.rules();
            let (verdict, findings) = self.decide(&rules, subject).await;
            let verdict = match verdict {
                Ok(destination) => {
                    let passed = Passed {
                        host: subject.host.clone(),
                        port: subject.port,
                        overridden: findings.iter().any(|finding| finding.policy_override),
                        anywhere: is_anywhere(&destination),
                        cut: cut.clone(),
                    };
                    match self.policy.admit(passed) {
                        Some(pass) => Ok((destination, pass)),
                        // The rules changed meanwhile: judged again by the new ones.
                        None => continue,
                    }
                }
                Err(refusal) => Err(refusal),
            };
            let about = About {
                protocol: subject.protocol,
                host: Some(subject.host),
                port: subject.port,
                method: subject.method,
                client,
            };
            for finding in findings {
                self.report(&finding, &about);
            }
            return verdict;
        }
    }

    async fn decide(
        &self,
        rules: &Rules,
        subject: Subject<'_>,
    ) -> (Result<Destination, Refusal>, Vec<Finding>) {
        let (mut decision, mut step) =
            Decision::start(rules, self.mode, self.asking.is_some(), subject);
        let result = loop {
            step = match step {
                Step::Ask => {
                    let question = Question {
                        protocol: subject.protocol,
                        host: subject.host.clone(),
                        port: subject.port,
                    };
                    match &self.asking {
                        Some(asking) => decision.on_answer(asking.ask(question).await),
                        None => unreachable!("a decision asks only if it can"),
                    }
                }
                Step::LookUp => decision.on_lookup(self.look_up(subject.host.as_str()).await),
                Step::Passed(destination) => break Ok(destination),
                Step::Refused(refusal) => break Err(refusal),
            };
        };
        (result, decision.into_findings())
    }

    pub(crate) fn report(&self, finding: &Finding, about: &About<'_>) {
        self.observer.observe(Record::new(finding, about, SystemTime::now()));
    }

    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    async fn look_up(&self, name: &str) -> Option<Vec<IpAddr>> {
        let found = timeout(self.limits.lookup_timeout, self.connector.look_up(name)).await;
        found.ok()?.ok()
    }
}
