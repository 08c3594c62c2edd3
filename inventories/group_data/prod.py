"""What holds for the whole production environment of the example inventory."""

ssh_user = "deploy"
_sudo = True
# The password of that sudo, where it asks for one; the file has mode 0600.
# sudo_password = "file:/home/me/.config/fp8fleet/sudo"

# The site's mirror: conda frontend and channel, Python wheels. The digest is `sha256sum` of the
# file on your mirror; this one is an example.
conda_frontend_url = "https://mirror.example.com/miniforge/Miniforge3-Linux-x86_64.sh"
conda_frontend_sha256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
conda_channels = ["https://mirror.example.com/conda-forge"]
package_index = "https://mirror.example.com/pypi/simple"
ca_bundle = "/etc/ssl/certs/site-ca.pem"

# The model: put your own manifest under models/.
model_manifest = "models/tiny-llama/manifest.toml"
model_sources = ["https://mirror.example.com/models/tiny-llama/"]
served_model_name = "assistant"

# Clients send this key. `fp8fleet plan` and `render` don't need it; deploys do.
api_key = "env:FP8FLEET_API_KEY"
