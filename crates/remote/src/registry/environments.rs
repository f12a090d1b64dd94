//! Managing the environments of a registry: listing and removing.

use http::Method;
use serde::de::IgnoredAny;

use super::messages::{EnvironmentStatus, ListResponse};
use super::{Registry, RegistryError};

impl Registry {
    /// All environments that the credential covers.
    pub async fn list(&self) -> Result<Vec<EnvironmentStatus>, RegistryError> {
        let response: ListResponse =
            self.call(Method::GET, &["cloud", "environments"], None::<&()>).await?;
        Ok(response.environments)
    }

    /// One environment.
    pub async fn show(&self, environment_id: &str) -> Result<EnvironmentStatus, RegistryError> {
        self.call(Method::GET, &["cloud", "environment", environment_id], None::<&()>).await
    }

    /// Removes an environment from the registry and closes its connections.
    pub async fn remove(&self, environment_id: &str) -> Result<(), RegistryError> {
        let path = ["cloud", "environment", environment_id];
        let _: IgnoredAny = self.call(Method::DELETE, &path, None::<&()>).await?;
        Ok(())
    }
}
