"""`python -m fedjax_ssl` lists the commands, and `python -m fedjax_ssl COMMAND` runs one, as `fedjax-ssl COMMAND` does."""

from fedjax_ssl.launch.main import main

if __name__ == "__main__":
    main()
