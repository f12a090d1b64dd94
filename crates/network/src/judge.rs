//! Runs a [`Decision`] to its end: asks, looks up, and tells the audit.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::time::timeout;

use crate::audit::{About, Observer, Record};
use crate::config::{Config, Limits};
use crate::connector::Connector;
use crate::decide::{Decision, Destination, Finding, Mode, Refusal, Step, Subject};
use crate::decider::{Asking, Decider, Question};
use crate::rules::Rules;

pub(crate) struct Judge {
    rules: Rules,
    mode: Mode,
    asking: Option<Asking>,
    connector: Arc<dyn Connector>,
    limits: Limits,
    observer: Arc<dyn Observer>,
}

impl Judge {
    pub(crate) fn new(
        config: &Config,
        decider: Option<Arc<dyn Decider>>,
        observer: Arc<dyn Observer>,
    ) -> Self {
        let asking = config.ask_timeout.zip(decider).map(|(timeout, decider)| Asking {
            decider,
            timeout: timeout.saturating_add(config.limits.answer_grace),
        });
        Self {
            rules: config.rules.clone(),
            mode: config.mode,
            asking,
            connector: config.connector.clone(),
            limits: config.limits.clone(),
            observer,
        }
    }

    /// Judges one request. `client`: the address it came from, for the audit.
    pub(crate) async fn judge(
        &self,
        subject: Subject<'_>,
        client: Option<&str>,
    ) -> Result<Destination, Refusal> {
        let (mut decision, mut step) =
            Decision::start(&self.rules, self.mode, self.asking.is_some(), subject);
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
        let about = About {
            protocol: subject.protocol,
            host: Some(subject.host),
            port: subject.port,
            method: subject.method,
            client,
        };
        for finding in decision.into_findings() {
            self.report(&finding, &about);
        }
        result
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
