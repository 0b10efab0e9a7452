<#
.SYNOPSIS
  Installs Anabranch into an environment of its own and puts `anabranch` on the path.
.DESCRIPTION
  Nothing outside your profile is changed. To remove it, delete the directory and its bin
  entry in your PATH. Peers on Windows are light: they join a network that others founded. This
  script was checked by reading only; it has not been run on Windows yet.
.EXAMPLE
  .\install.ps1                                            # in a clone of the repository
  .\install.ps1 -Source anabranch-0.1.0-py3-none-any.whl
#>
[CmdletBinding()]
param(
    [string]$Source = "",
    [string]$Prefix = (Join-Path $env:LOCALAPPDATA "anabranch"),
    [string]$Python = "python"
)
Set-StrictMode -Version Latest
$ErrorActionPreference = "Stop"

# There is no release yet: a clone or a wheel must be named, and no package of that name is guessed.
# $PSScriptRoot is empty where the script is piped into a shell.
if (-not $Source -and $PSScriptRoot -and (Test-Path -LiteralPath (Join-Path $PSScriptRoot "anabranch\commands.py"))) { $Source = $PSScriptRoot }
if (-not $Source) { throw "Nothing to install: run this in a clone, or name a wheel with -Source FILE." }
if (Test-Path -LiteralPath $Source) { $Source = (Resolve-Path -LiteralPath $Source).Path }

if (-not (Get-Command $Python -ErrorAction SilentlyContinue)) { throw "There is no ${Python}: install Python 3.11 or newer from python.org, or name it with -Python PATH." }
& $Python -c "import sys; sys.exit(sys.version_info < (3, 11))"
if ($LASTEXITCODE -ne 0) { throw "Python 3.11 or newer is needed: install it from python.org, or name it with -Python PATH." }

$environment = Join-Path $Prefix "venv"
Write-Host "Anabranch from $Source into $environment"
& $Python -m venv $environment
if ($LASTEXITCODE -ne 0) { throw "No environment could be made; what Python says stands above." }
$own = Join-Path $environment "Scripts\python.exe"
& $own -m pip --disable-pip-version-check install --quiet --upgrade $Source
if ($LASTEXITCODE -ne 0) { throw "It could not be installed; what pip says stands above." }
Set-Content -LiteralPath (Join-Path $environment "anabranch-source") -Value $Source -Encoding utf8

# A directory with this one command: that of the environment has a python of its own.
$commands = Join-Path $Prefix "bin"
New-Item -ItemType Directory -Force -Path $commands | Out-Null
Copy-Item -Force -LiteralPath (Join-Path $environment "Scripts\anabranch.exe") -Destination $commands
$path = [Environment]::GetEnvironmentVariable("Path", "User")
if (($path -split ";") -notcontains $commands) {
    [Environment]::SetEnvironmentVariable("Path", "$commands;$path", "User")
    Write-Host "$commands was put on the path of new shells."
}
$env:Path = "$commands;$env:Path"
& (Join-Path $commands "anabranch.exe") --version
if ($LASTEXITCODE -ne 0) { throw "It is installed and does not start; what it says stands above." }
Write-Host "Join a network:       anabranch join anabranch:..."
Write-Host "Look what it lacks:   anabranch doctor"
Write-Host "The newest version:   anabranch update"
